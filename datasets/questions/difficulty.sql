-- difficulty: how many of the problems tried have which pass rate
with final as (
    select round(pass_rate, 3) as pass_rate, count(*) as problems
    from pass_rates
    group by all
    order by pass_rate
)

select * from final
